"""The check that `sinks` lies beside `coordinator`, which raises ImportError otherwise.

Other packages, and users' folders, have these names, too.
"""

from importlib.util import find_spec
from pathlib import Path

_HERE = Path(__file__).parents[1]
_SPEC = find_spec("sinks")
_THERE = Path(_SPEC.origin) if _SPEC and _SPEC.origin else None

if _THERE is None or _THERE.parents[1] != _HERE:
    raise ImportError(
        f"`coordinator` was imported from {_HERE}, where `sinks` is of the same library "
        f"(pyspark-exactly-once); but `import sinks` leads to {_THERE or 'nothing'}. Something "
        "else has that name and comes first in sys.path: rename it, or remove it from the path; "
        "uninstall a package of that name"
    )
