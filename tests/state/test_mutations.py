from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis as sync_redis

from decant.state import private_redis, scripts
from decant.state.client import Client
from decant.state.errors import StateError
from decant.state.ids import RequestKey
from decant.state.private_redis import PrivateRedis
from decant.state.scripts import Script
from decant.state.store import Store
from tests.state import (
    test_directory,
    test_keep_the_greater,
    test_outage,
    test_private_redis,
    test_request_owners,
    test_requests,
)
from tests.state import test_open_requests as test_open
from tests.state import test_store_instance_and_quota as test_instance_and_quota

pytestmark = pytest.mark.slow

Patch = pytest.MonkeyPatch
FOUND = (AssertionError, StateError, pytest.fail.Exception)


@dataclass(frozen=True)
class Fault:
    script: Script
    text: str
    instead: str
    found_by: Callable[..., Any] = test_keep_the_greater.test_redis_keeps_the_greatest_of_what_owners_write

    def __str__(self) -> str:
        return f"{self.script.name}: {self.text}"

    def commit(self, patch: Patch) -> None:
        assert self.text in self.script.text, "the script has changed: update this fault"
        broken = scripts.script(self.script.name, self.script.text.replace(self.text, self.instead))
        patch.setattr(scripts, self.script.name.upper(), broken)


REPLACED = test_requests.test_a_request_that_failed_without_a_token_is_replaced_by_an_equal_one
CANCELLING = test_request_owners.test_an_owner_superseded_by_a_cancel_is_notified_at_once
REUSED = partial(test_request_owners.test_an_id_belongs_to_the_payload_that_was_stored_first, epoch=2)
STREAM = test_request_owners.test_a_superseded_owner_learns_whether_a_clients_stream_took_the_request
UNRECORDED = test_requests.test_a_request_after_an_unrecorded_failure_has_the_greater_epoch
REPAIRED = test_requests.test_logprobs_that_lost_their_end_are_repaired

FAULTS = [
    Fault(scripts.REQUEST_WRITE, "epoch < old_epoch or", ""),
    Fault(scripts.REQUEST_WRITE, "owner ~= old_owner or", ""),
    Fault(scripts.REQUEST_WRITE, "or attempt < old_attempt", ""),
    Fault(scripts.REQUEST_WRITE, "or epoch > old_epoch", ""),
    Fault(scripts.REQUEST_WRITE, "if not whole then", "if false then"),
    Fault(scripts.REQUEST_WRITE, "redis.call('DEL', unpack(KEYS))", ""),
    Fault(scripts.REQUEST_WRITE, "if length < base or logprobs < base then", "if false then"),
    Fault(scripts.REQUEST_WRITE, "(length - base) * bytes_each + 1", "1"),
    Fault(scripts.REQUEST_WRITE, "attempt > old_attempt or", ""),
    Fault(scripts.REQUEST_WRITE, "rank(state) > rank(old_state)", "state ~= old_state"),
    Fault(scripts.REQUEST_WRITE, "and last >= length", ""),
    Fault(scripts.REQUEST_WRITE, "or (state == old_state and last >= length)", ""),
    Fault(scripts.REQUEST_WRITE, "or logprobs < base", "", REPAIRED),
    Fault(scripts.REQUEST_WRITE, "if whole and old_epoch and", "if false and", REUSED),
    Fault(scripts.REQUEST_WRITE, "if size > 0 then", "if false then"),
    Fault(scripts.REQUEST_WRITE, "and ARGV[12] ~= ''", ""),
    Fault(scripts.REQUEST_ACCEPT, "(epoch or 0) + 1", "1", REPLACED),
    Fault(scripts.REQUEST_ACCEPT, ", tonumber(ARGV[6])", "", UNRECORDED),
    Fault(scripts.REQUEST_ACCEPT, "redis.call('DEL', KEYS[1])", "", REPLACED),
    Fault(scripts.REQUEST_ACCEPT, "state ~= FAILED or", ""),
    Fault(scripts.REQUEST_ACCEPT, "or redis.call('EXISTS', KEYS[2]) == 1", ""),
    Fault(scripts.REQUEST_ADOPT, "redis.call('HSET', KEYS[1], 'state', CANCELLED)", "", CANCELLING),
    Fault(scripts.REQUEST_ADOPT, "keep(ARGV[4], unpack(KEYS))", "", CANCELLING),
    Fault(scripts.REQUEST_ADOPT, "'owner', ARGV[1])", "'owner', ARGV[1], 'stream_epoch', 1)", STREAM),
    Fault(scripts.REQUEST_ADOPT, "if ARGV[3] == '' then", "if false then", STREAM),
    Fault(scripts.REQUEST_ADOPT, "epoch + 1", "epoch"),
    Fault(scripts.REQUEST_ADOPT, "tonumber(ARGV[3]) ~= epoch", "false"),
    Fault(scripts.REQUEST_ADOPT, "state < FIRST_END and", ""),
    Fault(scripts.REQUEST_WRITE, "if newer or", "if true or", test_requests.test_an_ended_request_is_kept_for_its_time),
    Fault(
        scripts.REQUEST_ACCEPT,
        "keep(ARGV[5], KEYS[1])",
        "",
        test_requests.test_every_key_but_the_store_instance_has_a_lifetime,
    ),
    Fault(
        scripts.REQUEST_ACCEPT, "digest ~= ARGV[2]", "false", test_requests.test_an_id_with_another_payload_is_refused
    ),
    Fault(
        scripts.REQUEST_ACCEPT,
        "return {'exists'",
        "return {'new', 1} or {'exists'",
        test_requests.test_the_same_id_and_payload_shows_what_is_there,
    ),
    Fault(
        scripts.REQUEST_ADOPT,
        "tonumber(ARGV[3]) ~= epoch",
        "false",
        test_request_owners.test_of_many_that_race_for_one_epoch_one_wins,
    ),
    Fault(
        scripts.REQUEST_ADOPT,
        "and owner ~= ARGV[1]",
        "",
        test_request_owners.test_a_repeated_adoption_changes_nothing,
    ),
    Fault(
        scripts.OPEN_ADD,
        "redis.call('SADD', KEYS[2], ARGV[1])",
        "",
        test_open.test_a_dead_routers_requests_go_on_elsewhere,
    ),
    Fault(scripts.OPEN_TAKE, "return {'registered'}", "", test_open.test_a_living_router_keeps_its_requests),
    Fault(scripts.OPEN_TAKE, "'SPOP'", "'SRANDMEMBER'", test_open.test_of_several_routers_one_takes_each_request),
    Fault(
        scripts.OPEN_TAKE,
        "redis.call('SADD', KEYS[3], ARGV[4])",
        "",
        test_open.test_of_several_routers_one_takes_each_request,
    ),
    Fault(scripts.OPEN_TAKE, "== ARGV[2]", "", test_open.test_an_earlier_incarnation_of_a_live_router_is_dead),
    Fault(
        scripts.OPEN_ORPHANED,
        "~= incarnation",
        "== nil",
        test_open.test_an_earlier_incarnation_of_a_live_router_is_dead,
    ),
    Fault(
        scripts.DIRECTORY_RENEW, "return 0", "", test_directory.test_an_earlier_incarnation_has_no_effect_on_the_new_one
    ),
    Fault(
        scripts.DIRECTORY_RENEW,
        "and tonumber(found[2]) >= since",
        "",
        test_directory.test_the_order_of_incarnations_survives_an_emptied_redis,
    ),
    Fault(scripts.DIRECTORY_RENEW, "or found[3] ~= ARGV[3]", "", test_directory.test_a_change_wakes_waiters),
    Fault(
        scripts.DIRECTORY_REGISTER,
        "math.max(now, (since or 0) + 1)",
        "1",
        test_directory.test_the_order_of_incarnations_survives_an_emptied_redis,
    ),
    Fault(
        scripts.DIRECTORY_REMOVE,
        "~= ARGV[2]",
        "== nil",
        test_directory.test_an_earlier_incarnation_has_no_effect_on_the_new_one,
    ),
    Fault(
        scripts.DIRECTORY_LIST,
        "'-inf', now)",
        "'-inf', 0)",
        test_directory.test_a_registration_that_is_not_renewed_expires,
    ),
    Fault(
        scripts.DIRECTORY_IS_REGISTERED,
        "> now_ms()",
        "",
        test_request_owners.test_an_orphan_is_adopted_only_when_its_owner_is_gone,
    ),
    Fault(
        scripts.STORE_INSTANCE,
        "'HSETNX'",
        "'HSET'",
        test_instance_and_quota.test_a_store_instance_is_created_once_and_ends_with_the_data,
    ),
    Fault(
        scripts.QUOTA_ACQUIRE,
        "running >= most",
        "false",
        test_instance_and_quota.test_no_more_than_the_limit_is_in_flight,
    ),
    Fault(
        scripts.QUOTA_ACQUIRE,
        "'-inf', now_in_ms",
        "'-inf', 0",
        test_instance_and_quota.test_the_quota_leases_of_a_dead_router_expire,
    ),
    Fault(
        scripts.QUOTA_ACQUIRE,
        "if not redis.call('ZSCORE'",
        "if true or redis.call('ZSCORE'",
        test_instance_and_quota.test_tokens_are_charged_once_and_settled_by_what_was_used,
    ),
    Fault(
        scripts.QUOTA_ACQUIRE,
        "used > 0 and",
        "",
        test_instance_and_quota.test_a_request_larger_than_the_minute_waits_for_a_full_one_and_is_taken,
    ),
    Fault(
        scripts.QUOTA_RELEASE,
        "return 0",
        "",
        test_instance_and_quota.test_tokens_are_charged_once_and_settled_by_what_was_used,
    ),
]


async def finds(test: Callable[..., Any], **given: Any) -> None:
    asked = {name: value for name, value in given.items() if name in inspect.signature(test).parameters}
    with pytest.raises(FOUND):
        await test(**asked)


@pytest.mark.parametrize("fault", FAULTS, ids=str)
async def test_the_tests_detect_a_fault_in_a_script(
    fault: Fault, store: Store, bare: sync_redis.Redis, server: PrivateRedis, monkeypatch: Patch
) -> None:
    fault.commit(monkeypatch)
    await finds(fault.found_by, store=store, bare=bare, server=server)


async def test_ambiguous_keys_are_found(bare: sync_redis.Redis, server: PrivateRedis, monkeypatch: Patch) -> None:
    monkeypatch.setattr(RequestKey, "__str__", lambda key: f"{key.tenant}/{key.id}")
    await finds(test_requests.test_another_tenants_id_is_unknown, bare=bare, server=server)


async def test_scripts_that_are_not_loaded_again_are_found(
    store: Store, bare: sync_redis.Redis, monkeypatch: Patch
) -> None:
    bare.script_flush()

    async def load(client: Client, commands: object) -> None:
        pass

    monkeypatch.setattr(Client, "_load", load)
    await finds(test_outage.test_lost_scripts_are_loaded_again, store=store, bare=bare)


@pytest.mark.parametrize("text", ['rm -rf -- "$folder"', "; kill -KILL $redis"])
def test_a_supervisor_that_forgets_its_redis_is_found(text: str, short_path: Path, monkeypatch: Patch) -> None:
    assert text in private_redis._KEEPER
    monkeypatch.setattr(private_redis, "_KEEPER", private_redis._KEEPER.replace(text, "", 1))
    monkeypatch.setattr("tempfile.tempdir", str(short_path))
    monkeypatch.setattr(private_redis, "_STOP_S", 0.5)  # it is never stopped
    try:
        with pytest.raises(FOUND):
            test_private_redis.test_a_silent_redis_is_stopped(short_path)
    finally:
        for process in test_private_redis.processes_in(short_path):
            process.kill()
