"""The files of TLS: a context made of them, and made anew where they change."""

import asyncio
import logging
import ssl
from dataclasses import dataclass
from pathlib import Path

from jaxpaged.errors import ConfigError

log = logging.getLogger(__name__)

LOOK_S = 5.0  # between two looks at the files


@dataclass(frozen=True)
class Certificates:
    """--ssl-certfile and the flags beside it."""

    certfile: str
    keyfile: str | None
    ca_certs: str | None
    cert_reqs: ssl.VerifyMode

    def context(self) -> ssl.SSLContext:
        """A context for servers.

        Raises:
            ConfigError: a file that cannot be used.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            self._load_into(context)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"--ssl-certfile and --ssl-keyfile cannot be used: {error}") from None
        context.verify_mode = self.cert_reqs
        return context

    async def keep_fresh(self, context: ssl.SSLContext, look_s: float = LOOK_S) -> None:
        """Let new connections have what the files hold; those that are open keep what they have.

        While the files cannot be used, a certificate beside another one's key for instance, the
        last that could be stay.
        """
        seen = self._stamps()
        while True:
            await asyncio.sleep(look_s)
            now = self._stamps()
            if now == seen:
                continue
            seen = now
            try:
                self.context()  # first aside: half of a pair would spoil the one in use
            except ConfigError as error:
                log.error("%s; the certificate in use stays", error)
                continue
            self._load_into(context)
            log.info("the certificate was read again")

    def _load_into(self, context: ssl.SSLContext) -> None:
        context.load_cert_chain(self.certfile, self.keyfile)
        if self.ca_certs is not None:
            context.load_verify_locations(self.ca_certs)

    def _stamps(self) -> list[tuple[int, int] | None]:
        """What tells whether a file is another one, also behind a link."""
        stamps: list[tuple[int, int] | None] = []
        for name in filter(None, (self.certfile, self.keyfile, self.ca_certs)):
            try:
                found = Path(name).stat()
                stamps.append((found.st_ino, found.st_mtime_ns))
            except OSError:
                stamps.append(None)
        return stamps
