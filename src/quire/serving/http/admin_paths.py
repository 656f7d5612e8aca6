"""The paths outside of /admin that need an admin key."""

from __future__ import annotations

# A router sends these requests to all replicas.
TO_ALL_REPLICAS = (
    "/sleep", "/wake_up", "/pause", "/resume", "/abort_requests", "/reset_prefix_cache",
    "/release_memory_occupation", "/resume_memory_occupation", "/pause_generation", "/continue_generation",
    "/abort_request", "/flush_cache", "/update_weights_from_disk",
)  # fmt: skip
PAGES = ("/is_sleeping", "/is_paused", "/get_weight_version", "/weight_info", "/get_world_size")
# Operations of vLLM, SGLang and TRL that this server does not have, and what to use instead.
_FILES = "save the weights to a folder below --weights-dir, and POST /update_weights_from_disk"
_GROUPS = f"this server joins no process group of a trainer: {_FILES}"
INSTEAD = {
    **dict.fromkeys(
        ("/update_weights_from_distributed", "/init_weights_update_group", "/destroy_weights_update_group",
         "/init_weight_transfer_engine", "/start_weight_update", "/start_draft_weight_update", "/update_weights",
         "/finish_weight_update", "/init_communicator", "/update_named_param", "/batch_update_named_params",
         "/close_communicator", "/get_tensor_parallel_size"), _GROUPS
    ),
    "/update_weights_from_tensor": f"tensors are not unpickled, since that can run code: {_FILES}",
    "/update_weights_from_ipc": f"no memory is shared with a trainer: {_FILES}",
    "/update_weight_version": "a version belongs to an update: send weight_version to /update_weights_from_disk",
    "/get_weights_by_name": "weights are held fused and packed: read the files, and GET /get_weight_version",
    "/weight_checker": "weights are held fused and packed: compare answers, and GET /get_weight_version",
    "/weights_checker": "weights are held fused and packed: compare answers, and GET /get_weight_version",
    "/collective_rpc": "no method is called by its name: POST /sleep, /wake_up or /update_weights_from_disk",
}  # fmt: skip
ADMIN_ENDS = ("/load_lora_adapter", "/unload_lora_adapter", *TO_ALL_REPLICAS, *PAGES, *INSTEAD)
