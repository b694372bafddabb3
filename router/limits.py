"""What one request may ask of this router, beyond what its model allows."""

from __future__ import annotations

from protos import inference_pb2 as pb

MAX_REQUEST_BYTES = 16 * 1024 * 1024
MAX_REQUEST_ID_BYTES = 128
MAX_OUTPUTS = 1
MAX_LOGPROBS = 20
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIAS_ENTRIES = 1024
MAX_PRIORITY = 1000


def limits(*, max_queued_requests: int, resume_grace_ms: int, result_ttl_ms: int) -> pb.Limits:
    """As clients are told. What stays 0 belongs to fields that are refused."""
    return pb.Limits(
        max_request_bytes=MAX_REQUEST_BYTES,
        max_request_id_bytes=MAX_REQUEST_ID_BYTES,
        max_outputs=MAX_OUTPUTS,
        max_logprobs=MAX_LOGPROBS,
        max_stop_token_ids=MAX_STOP_TOKEN_IDS,
        max_logit_bias_entries=MAX_LOGIT_BIAS_ENTRIES,
        resume_grace_ms=resume_grace_ms,
        result_ttl_ms=result_ttl_ms,
        max_queued_requests=max_queued_requests,
    )
