from __future__ import annotations

from pathlib import Path

import pytest

from decant.protos import worker_pb2 as wire
from decant.router.workers.pool import WorkerPool
from decant.runtime.background import BackgroundTask
from decant.runtime.connections import certificates
from decant.runtime.connections.certificates import PEER_NAME, PeerFiles
from decant.runtime.connections.peer import new_peer
from decant.runtime.connections.tls import PeerTls, ServerTls, server_credentials
from decant.runtime.settings import SettingError
from decant.state.store import Store
from tests.router.fake_script import MODEL, TOKENIZER
from tests.router.fake_worker import FakeWorker, fleet
from tests.router.harness import until

D, D2 = ("d", wire.ROLE_DECODE), ("d2", wire.ROLE_DECODE)


def pool_with(files: PeerFiles, store: Store) -> WorkerPool:
    tls = PeerTls(peer_ca=files.ca, peer_certificate=files.certificate, peer_key=files.key, peer_name=PEER_NAME)
    return WorkerPool(new_peer("router"), store.workers, {MODEL: {TOKENIZER}}, tls, 0)


def server_tls(files: PeerFiles) -> ServerTls:
    return ServerTls(tls_certificate=files.certificate, tls_key=files.key, tls_client_ca=files.ca)


async def serve_with(files: PeerFiles, worker: FakeWorker) -> None:
    worker.credentials = server_credentials(server_tls(files))
    await worker.restart()


def replace(old: PeerFiles, new: PeerFiles) -> None:
    for name in ("ca", "certificate", "key"):
        getattr(new, name).rename(getattr(old, name))


def usable(pool: WorkerPool) -> dict[str, int]:
    return {worker.incarnation.id: worker.generation for worker in pool.of(MODEL) if worker.is_usable}


async def test_a_router_reaches_workers_again_after_all_certificates_were_replaced(
    store: Store, tmp_path: Path
) -> None:
    files = certificates.make(tmp_path / "tls")
    async with fleet(D) as (worker,):
        await serve_with(files, worker)
        await store.workers.register(worker.registration)
        pool = pool_with(files, store)
        watching = BackgroundTask("pool", pool.membership.run)
        watching.start()
        try:
            await until(lambda: usable(pool) == {"d": 0})
            replace(files, certificates.make(tmp_path / "new"))
            assert usable(pool) == {"d": 0}, "an open connection goes on"
            await worker.restart()
            await until(lambda: usable(pool) == {"d": 1})
        finally:
            await watching.close()
            await pool.membership.close()


async def test_files_that_do_not_fit_together_for_a_while_cost_a_router_nothing(store: Store, tmp_path: Path) -> None:
    files = certificates.make(tmp_path / "tls")
    async with fleet(D, D2) as (first, second):
        await serve_with(files, first)
        await serve_with(files, second)
        await store.workers.register(first.registration)
        pool = pool_with(files, store)
        watching = BackgroundTask("pool", pool.membership.run)
        watching.start()
        try:
            await until(lambda: usable(pool) == {"d": 0})
            certificates.make(tmp_path / "new").key.rename(files.key)
            with pytest.raises(SettingError):
                server_credentials(server_tls(files))
            await store.workers.register(second.registration)
            await until(lambda: usable(pool) == {"d": 0, "d2": 0})
        finally:
            await watching.close()
            await pool.membership.close()
