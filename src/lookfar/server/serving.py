"""An LM, its settings and its keys → a server that runs until it is told to stop."""

from __future__ import annotations

import logging
import signal

from lookfar.engine.thread_pool import release_thread_pool
from lookfar.errors import ConfigError
from lookfar.lm import LM
from lookfar.server.app import create_app
from lookfar.server.config import ServerConfig
from lookfar.server.keys import ApiKeys
from lookfar.server.run import make_server
from lookfar.server.service import Service

log = logging.getLogger("lookfar.server")


def serve_forever(lm: LM, config: ServerConfig, keys: ApiKeys, address: tuple[str, int]) -> None:
    """Serve until SIGINT or SIGTERM; then finish what is running, save the store, and return."""
    lm.driver.works_when_idle = True
    release_thread_pool()  # this thread has loaded the model and computes nothing from now on
    service = Service(lm, config)
    for tenant in keys.tenants:
        service.namespaces.draft_state(tenant.namespace)  # a damaged file is found now
    server = make_server(create_app(service, keys), service, *address)
    host = f"[{address[0]}]" if ":" in address[0] else address[0]
    fields = {"model": config.model_name, "device": str(lm.device), "keys": keys.required}
    log.info("starting", extra={"fields": fields | {"url": f"http://{host}:{address[1]}"}})
    # uvicorn repeats a signal when it has stopped, and the process would end there.
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        server.run()
    except SystemExit as error:  # uvicorn has logged why
        raise ConfigError(
            f"The server cannot listen on {address[0]}, port {address[1]}: use another --port."
        ) from error
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGTERM, before)
    log.info("stopped")
