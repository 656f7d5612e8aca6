"""Counts the memory that the weights of a model take, as they are stored."""

from __future__ import annotations

from quire.runtime.object_tensors import reachable_tensors


def tensor_bytes(root: object, apart: object = None) -> int:
    """Return the bytes of all tensors that can be reached from an object, except those that can be reached from
    `apart`. Shared memory counts once. Parameters and buffers would not be enough, as layers keep packed weights in
    other objects."""
    storages: dict[int, int] = {}
    for tensor in reachable_tensors(root):
        if tensor.is_mkldnn:  # packed by oneDNN: its storage is not accessible
            storages[id(tensor)] = tensor.numel() * tensor.element_size()
        elif tensor.device.type != "meta":
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    for tensor in reachable_tensors(apart):
        storages.pop(tensor.untyped_storage().data_ptr(), None)
    return sum(storages.values())
