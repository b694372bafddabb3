from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable

from decant.command.errors import CommandFailed
from decant.command.up import checks, resources
from decant.command.up.options import UpOptions
from decant.command.up.output import Columns, Output
from decant.command.up.plan import Plan, make_plan
from decant.command.up.screen import Screen
from decant.command.up.supervisor import StartFailed, Supervisor
from decant.runtime import host_memory
from decant.runtime.serving.shutdown import race
from decant.runtime.settings import InvalidSettings
from decant.runtime.telemetry import logs
from decant.runtime.telemetry.logs import LogSettings
from decant.state.errors import PrivateRedisFailed
from decant.state.private_redis import PrivateRedis


def run(options: UpOptions) -> int:
    """Run a deployment; return the exit status, 0 after a graceful end. Raises CommandFailed if the start fails.

    A keeper process removes the temporary files even if this one is killed.
    """
    if options.log_format not in ("auto", "json", "console"):
        raise CommandFailed(f"--log-format: auto, json or console, got {options.log_format}", status=2)
    check(options)
    return supervise(lambda url: make_plan(options, url), options.redis_url, _output(options.log_format))


def _output(log_format: str) -> Output:
    match log_format:
        case "console":
            return Columns(sys.stdout)
        case "auto" if sys.stdout.isatty():
            return Screen(sys.stdout)
        case _:
            return Output(sys.stdout)


def check(options: UpOptions) -> None:
    checks.check_model(options)
    try:
        plan = make_plan(options, options.redis_url or "redis://")
    except InvalidSettings as error:
        raise CommandFailed(str(error), status=2) from None
    checks.check_peers(plan)
    checks.check_memory(options, plan)
    checks.check_gateways(plan)
    checks.check_ports(plan, options.host)
    if options.redis_url is not None:
        checks.check_redis(options.redis_url)


def supervise(plan_for: Callable[[str], Plan], redis_url: str | None, output: Output) -> int:
    logs.start("up", LogSettings(log_format="json"), stream=output.stream("up"))
    try:
        return asyncio.run(_supervise(plan_for, redis_url, output))
    except PrivateRedisFailed as error:
        raise CommandFailed(f"Redis: {error}") from None
    except StartFailed as error:
        raise CommandFailed(str(error), status=error.status) from None
    finally:
        output.close()


async def _supervise(plan_for: Callable[[str], Plan], redis_url: str | None, output: Output) -> int:
    if redis_url is not None:
        return await Supervisor(plan_for(redis_url), output).run()
    async with PrivateRedis(options=resources.redis_limit(host_memory.available_memory())) as redis:
        return await race(Supervisor(plan_for(redis.url), output).run(), _ended(redis))


async def _ended(redis: PrivateRedis) -> int:
    await asyncio.to_thread(redis.wait)
    raise PrivateRedisFailed("it ended, and all else with it")
