"""What protoc makes of this file, made when it is imported, so that any version of Protobuf takes it."""

from __future__ import annotations

from google.protobuf import timestamp_pb2  # noqa: F401 - is imported below
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import Default
from google.protobuf.message_factory import GetMessageClass
from google.protobuf.text_format import Parse

_FILE = """
name: "orders.proto" package: "shop" syntax: "proto3" dependency: "google/protobuf/timestamp.proto"
message_type {
  name: "Order"
  field { name: "id" number: 1 type: TYPE_INT64 label: LABEL_OPTIONAL }
  field { name: "at" number: 2 type: TYPE_MESSAGE type_name: ".google.protobuf.Timestamp" label: LABEL_OPTIONAL }
  field { name: "tags" number: 5 type: TYPE_STRING label: LABEL_REPEATED }
  field { name: "note" number: 7 type: TYPE_STRING label: LABEL_OPTIONAL proto3_optional: true oneof_index: 0 }
  oneof_decl { name: "_note" }
}
"""
_CONTENT = Parse(_FILE, FileDescriptorProto()).SerializeToString()
Order = GetMessageClass(Default().AddSerializedFile(_CONTENT).message_types_by_name["Order"])
