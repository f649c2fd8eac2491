"""Puts that go wrong on their way, for any storage behind a `Proxy`."""

from __future__ import annotations

from coordinator.storage import CheckpointStorage
from tests.storage.proxy import Proxy


class LostPuts:
    """Uses the fixtures `storage` (through `proxy`) and `direct` (past it)."""

    PUT: bytes
    """What a put looks like to the proxy."""

    def test_a_put_whose_answer_is_lost_is_known_as_ones_own(
        self, storage: CheckpointStorage, direct: CheckpointStorage, proxy: Proxy
    ) -> None:
        seen: list[bytes | None] = []
        proxy.cut_at, proxy.after_answer, proxy.on_cut = self.PUT, True, lambda: seen.append(direct.get("a"))
        assert storage.put_if_absent("a", b"mine") is True
        assert seen == [b"mine"], "the value was there before the connection was cut"
        assert proxy.cuts == 1

    def test_a_put_that_did_not_arrive_is_done_again(
        self, storage: CheckpointStorage, direct: CheckpointStorage, proxy: Proxy
    ) -> None:
        proxy.cut_at = self.PUT
        assert storage.put_if_absent("a", b"mine") is True
        assert proxy.cuts == 1
        assert direct.get("a") == b"mine"

    def test_a_put_that_did_not_arrive_and_lost_the_race(
        self, storage: CheckpointStorage, direct: CheckpointStorage, proxy: Proxy
    ) -> None:
        proxy.cut_at, proxy.on_cut = self.PUT, lambda: direct.put_if_absent("a", b"theirs")
        assert storage.put_if_absent("a", b"mine") is False
        assert proxy.cuts == 1
        assert direct.get("a") == b"theirs"
