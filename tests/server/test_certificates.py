"""TLS over real files, which another program may write anew while the server runs."""

import asyncio
import shutil
import ssl
import subprocess
from pathlib import Path

import pytest

from jaxpaged.errors import ConfigError
from server.certificates import Certificates

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="makes them with openssl")


def write_pair(folder: Path, name: str) -> tuple[Path, Path]:
    """A certificate for `name`, and its key."""
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-subj", f"/CN={name}", "-keyout", str(key), "-out", str(cert)]
    subprocess.run(command, check=True, capture_output=True)
    return cert, key


async def presented(port: int, known: Path) -> str:
    """The name in the certificate that a new connection sees, which must be one of `known`."""
    context = ssl.create_default_context(cafile=str(known))
    context.check_hostname = False
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    name = writer.get_extra_info("peercert")["subject"][0][0][1]
    writer.close()
    return name


async def test_new_files_are_read_and_half_of_a_pair_is_not(tmp_path, caplog):
    pairs = [write_pair(tmp_path, name) for name in ("first", "second")]
    known = tmp_path / "known.pem"
    known.write_text("".join(cert.read_text() for cert, _ in pairs))
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    shutil.copy(pairs[0][0], cert), shutil.copy(pairs[0][1], key)
    certificates = Certificates(str(cert), str(key), None, ssl.CERT_NONE)
    context = certificates.context()
    task = asyncio.create_task(certificates.keep_fresh(context, look_s=0.01))
    served = await asyncio.start_server(lambda r, w: None, "127.0.0.1", 0, ssl=context)
    port = served.sockets[0].getsockname()[1]
    try:
        assert await presented(port, known) == "first"
        shutil.copy(pairs[1][0], cert)
        async with asyncio.timeout(5):
            while "stays" not in caplog.text:
                await asyncio.sleep(0.01)
        assert await presented(port, known) == "first"
        shutil.copy(pairs[1][1], key)
        async with asyncio.timeout(5):
            while await presented(port, known) != "second":
                await asyncio.sleep(0.01)
    finally:
        task.cancel()
        served.close()


def test_files_that_do_not_belong_together_are_refused(tmp_path):
    (cert, _), (_, key) = [write_pair(tmp_path, name) for name in ("first", "second")]
    with pytest.raises(ConfigError, match="--ssl-certfile and --ssl-keyfile cannot be used"):
        Certificates(str(cert), str(key), None, ssl.CERT_NONE).context()
