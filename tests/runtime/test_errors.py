import grpc
import pytest
from google.protobuf.any_pb2 import Any
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

from decant.protos import inference_pb2, worker_pb2
from decant.runtime.error_details import ErrorDetail, Reason, from_status, from_trailers, to_status, trailers
from decant.runtime.errors import FaultOwner, InvalidArgument, ServiceError, Unavailable, from_detail
from tests.runtime.cases import ERRORS, IDS

EVERY = pytest.mark.parametrize("error", ERRORS, ids=IDS)


@EVERY
def test_a_status_gives_the_same_typed_error_back(error: ServiceError) -> None:
    back = from_detail(from_status(Status.FromString(to_status(error.detail).SerializeToString())))
    assert type(back) is type(error)
    assert back.detail == error.detail
    assert str(back) == str(error)


@EVERY
def test_every_error_carries_error_info(error: ServiceError) -> None:
    info = ErrorInfo()
    assert to_status(error.detail).details[0].Unpack(info)
    assert (info.domain, info.reason) == ("decant", error.reason.value)


@EVERY
def test_an_error_fits_into_metadata(error: ServiceError) -> None:
    percent_encoded = sum(1 if 0x20 <= byte <= 0x7E else 3 for byte in error.detail.message.encode())
    assert percent_encoded + sum(len(key) + len(value) * 4 // 3 for key, value in trailers(error.detail)) < 8000


def test_reasons_are_those_of_the_wire() -> None:
    public = {name.removeprefix("ERROR_REASON_") for name in inference_pb2.ErrorReason.DESCRIPTOR.values_by_name}
    inside = {name.removeprefix("CAUSE_") for name in worker_pb2.Cause.DESCRIPTOR.values_by_name}
    ours = {reason.value for reason in Reason}
    assert public <= ours
    assert ours - public <= inside


def test_every_public_reason_has_a_case() -> None:
    assert {error.reason for error in ERRORS} == set(Reason) - {Reason.UNSPECIFIED}


def test_only_server_faults_count_as_server_errors() -> None:
    server_errors = {(error.reason, error.code) for error in ERRORS if error.fault_owner is FaultOwner.SERVER}
    assert server_errors == {
        (Reason.INTERNAL, grpc.StatusCode.INTERNAL),
        (Reason.WORKERS_LOST, grpc.StatusCode.UNAVAILABLE),
        (Reason.WORKERS_LOST, grpc.StatusCode.ABORTED),
        (Reason.STATE_STORE_UNAVAILABLE, grpc.StatusCode.UNAVAILABLE),
        (Reason.TAIL_UNCERTAIN, grpc.StatusCode.ABORTED),
    }


def test_retryable_errors_have_a_retry_delay() -> None:
    for error in ERRORS:
        assert error.retryable == (error.retry_after is not None), error
    assert [key for key, _ in trailers(ERRORS[IDS.index("QueueFull-queue_full-13")].detail)][1] == (
        "grpc-retry-pushback-ms"
    )


def test_clients_that_know_google_rpc_only_can_read_errors() -> None:
    status = to_status(InvalidArgument("sampling.top_p", "above 0, to 1", 1.5).detail)
    bad = BadRequest()
    assert status.details[1].Unpack(bad)
    assert bad.field_violations[0].field == "sampling.top_p"
    assert bad.field_violations[0].description == "above 0, to 1, got 1.5"
    retry = RetryInfo()
    assert to_status(Unavailable(Reason.DRAINING, "x", retry_after=1.25).detail).details[1].Unpack(retry)
    assert retry.retry_delay.ToMilliseconds() == 1250


@pytest.mark.parametrize(
    "details",
    [b"\xff\xff", b"", Status(code=13, message="x", details=[Any(type_url="what", value=b"\xff")]).SerializeToString()],
)
def test_a_status_that_is_not_ours_is_still_typed(details: bytes) -> None:
    detail = from_trailers(14, "refused", [("grpc-status-details-bin", details), ("other", "x")])
    assert detail == ErrorDetail(14, "refused")
    assert type(from_detail(detail)) is Unavailable
    assert from_detail(detail).retryable


def test_a_reason_of_a_newer_build_or_another_domain_is_unspecified() -> None:
    for info in (ErrorInfo(domain="decant", reason="NEW"), ErrorInfo(domain="other", reason="INTERNAL")):
        status = Status(code=14, message="m")
        status.details.add().Pack(info)
        assert from_status(status).reason is Reason.UNSPECIFIED


def test_a_message_that_is_too_large_for_grpc_is_not_a_full_queue() -> None:
    error = from_detail(ErrorDetail(grpc.StatusCode.RESOURCE_EXHAUSTED.value[0], "Received message larger than max"))
    assert type(error) is ServiceError
    assert not error.retryable
