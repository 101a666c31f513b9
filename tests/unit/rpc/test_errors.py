from __future__ import annotations

from urllib.parse import quote

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from baton.core.errors import (
    AlreadyExistsError,
    CancelledError,
    DeadlineExceededError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    OutOfRangeError,
    ResourceExhaustedError,
    ServingError,
    UnauthenticatedError,
    UnavailableError,
)
from baton.rpc.errors import code_of, from_call, to_status


class StaleError(FailedPreconditionError):
    """A class of some other package."""

    default_reason = "STALE"


def sent(error: BaseException) -> grpc.aio.AioRpcError:
    """What a client sees of `error`."""
    status = to_status(error)
    return grpc.aio.AioRpcError(
        status.code, grpc.aio.Metadata(), grpc.aio.Metadata(*status.trailing_metadata), status.details
    )


def transport(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)


ERRORS = [
    (InvalidArgumentError("messages[1].role", "must be user", reason="BAD_ROLE"), grpc.StatusCode.INVALID_ARGUMENT),
    (OutOfRangeError("stop.max_tokens", "is beyond 8192", limit=8192), grpc.StatusCode.OUT_OF_RANGE),
    (OutOfRangeError("sampling.temperature", "is beyond 1.5", limit=1.5), grpc.StatusCode.OUT_OF_RANGE),
    (NotFoundError("model: no such model"), grpc.StatusCode.NOT_FOUND),
    (AlreadyExistsError("request_id: is live"), grpc.StatusCode.ALREADY_EXISTS),
    (FailedPreconditionError("differs", metadata={"ours": "a", "theirs": "b"}), grpc.StatusCode.FAILED_PRECONDITION),
    (
        ResourceExhaustedError("full", retry_after_s=1.25, metadata={"class": "chat"}),
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    ),
    (ResourceExhaustedError("too long", retry_after_s=None), grpc.StatusCode.RESOURCE_EXHAUSTED),
    (UnavailableError("no worker", reason="NO_WORKER"), grpc.StatusCode.UNAVAILABLE),
    (DeadlineExceededError("late"), grpc.StatusCode.DEADLINE_EXCEEDED),
    (CancelledError("gone"), grpc.StatusCode.CANCELLED),
    (UnauthenticatedError("who?"), grpc.StatusCode.UNAUTHENTICATED),
    (InternalError("the engine died", reason="ENGINE_DIED"), grpc.StatusCode.INTERNAL),
]


@pytest.mark.parametrize(("error", "code"), ERRORS, ids=lambda value: type(value).__name__)
def test_an_error_survives_the_wire(error: ServingError, code: grpc.StatusCode) -> None:
    assert code_of(error) is code
    received = from_call(sent(error))
    assert type(received) is type(error)
    assert vars(received) == vars(error)
    assert str(received) == str(error)


def test_every_class_of_the_hierarchy_is_mapped() -> None:
    mapped = {type(error) for error, _ in ERRORS}
    assert set(ServingError.__subclasses__()) - mapped <= {
        kind for kind in ServingError.__subclasses__() if kind.__module__ != "baton.core.errors"
    }


def test_a_subclass_takes_the_code_of_its_class() -> None:
    received = from_call(sent(StaleError("the lease ended")))
    assert type(received) is FailedPreconditionError
    assert received.reason == "STALE"


def test_details_are_those_that_clients_know() -> None:
    status = status_pb2.Status.FromString(dict(to_status(ERRORS[0][0]).trailing_metadata)["grpc-status-details-bin"])
    info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    assert status.details[0].Unpack(info)
    assert status.details[1].Unpack(bad)
    assert (info.reason, info.domain) == ("BAD_ROLE", "baton")
    assert [(v.field, v.description) for v in bad.field_violations] == [("messages[1].role", "must be user")]


def test_when_to_retry_is_told_twice() -> None:
    full = to_status(ResourceExhaustedError("full", retry_after_s=0.0101))
    trailers = dict(full.trailing_metadata)
    assert trailers["grpc-retry-pushback-ms"] == "11"
    retry = error_details_pb2.RetryInfo()
    details = status_pb2.Status.FromString(trailers["grpc-status-details-bin"]).details
    assert any(detail.Unpack(retry) for detail in details)
    assert retry.retry_delay.ToMilliseconds() == 11
    never = to_status(ResourceExhaustedError("too long", retry_after_s=None))
    assert dict(never.trailing_metadata)["grpc-retry-pushback-ms"] == "-1"


def test_what_is_no_serving_error_says_nothing() -> None:
    status = to_status(ValueError("/etc/secret"))
    assert status.code is grpc.StatusCode.INTERNAL
    assert "secret" not in str(status)


def test_trailers_stay_small_whatever_a_client_sent() -> None:
    for text in ("x" * 10**6, "\N{GRINNING FACE}" * 10**6):
        for error in (NotFoundError(text), InvalidArgumentError(text, text)):
            status = to_status(error)
            assert len(quote(status.details)) < 2048  # as it travels in `grpc-message`
            assert sum(len(key) + len(value) for key, value in status.trailing_metadata) < 4096
            assert from_call(sent(error)).message.startswith(error.message[:120])


def test_an_oversized_message_reads_well() -> None:
    error = from_call(
        transport(grpc.StatusCode.RESOURCE_EXHAUSTED, "SERVER: Received message larger than max (5242885 vs. 4194304)")
    )
    assert isinstance(error, ResourceExhaustedError)
    assert error.message == "a message of 5242885 bytes is larger than the limit of 4194304 bytes"
    assert error.reason == "MESSAGE_TOO_LARGE"
    assert error.retry_after_s is None


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, UnavailableError),
        (grpc.StatusCode.DEADLINE_EXCEEDED, DeadlineExceededError),
        (grpc.StatusCode.CANCELLED, UnavailableError),  # by a server that stops
        (grpc.StatusCode.INVALID_ARGUMENT, InvalidArgumentError),
        (grpc.StatusCode.OUT_OF_RANGE, InternalError),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, ResourceExhaustedError),
        (grpc.StatusCode.UNIMPLEMENTED, InternalError),
        (grpc.StatusCode.UNKNOWN, InternalError),
        (grpc.StatusCode.DATA_LOSS, InternalError),
    ],
)
def test_statuses_that_no_baton_process_wrote(code: grpc.StatusCode, kind: type[ServingError]) -> None:
    assert type(from_call(transport(code, "ipv4:10.0.0.1:99 said no"))) is kind
    assert type(from_call(transport(code, ""))) is kind


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED])
def test_an_unreachable_peer_names_no_address(code: grpc.StatusCode) -> None:
    error = from_call(transport(code, "failed to connect to all addresses: ipv4:10.0.0.1:99"))
    assert error.reason == "PEER_UNREACHABLE"
    assert "10.0.0.1" not in str(error)


@pytest.mark.parametrize("trailer", [b"", b"\xff\xff", status_pb2.Status(code=5, message="other").SerializeToString()])
def test_broken_details_are_no_details(trailer: bytes) -> None:
    call = grpc.aio.AioRpcError(
        grpc.StatusCode.NOT_FOUND,
        grpc.aio.Metadata(),
        grpc.aio.Metadata(("grpc-status-details-bin", trailer)),
        "no such model",
    )
    assert type(from_call(call)) is NotFoundError


def test_details_of_another_domain_are_not_ours() -> None:
    status = status_pb2.Status(code=8, message="quota")
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason="X", domain="mesh.example"))
    call = grpc.aio.AioRpcError(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.aio.Metadata(),
        grpc.aio.Metadata(("grpc-status-details-bin", status.SerializeToString())),
        "quota",
    )
    assert from_call(call).reason == "RESOURCE_EXHAUSTED"
