"""A certificate authority of the test's own, for servers on loopback.

trustme is imported here alone, and only when asked for: it comes with the extra ``test``.
"""

from __future__ import annotations

import ssl
from pathlib import Path

from dcpfs.errors import MissingBackendError

__all__ = ["TlsAuthority"]


class TlsAuthority:
    """Signs one certificate for 127.0.0.1, localhost and the names below s3.localhost.

    Args:
        directory: Where the authority's certificate is written.

    Attributes:
        ca_path: What a client is to trust, a PEM file.
        context: For the server.
    """

    def __init__(self, directory: Path) -> None:
        try:
            import trustme
        except ImportError as error:
            raise MissingBackendError("make a certificate: pip install 'dcpfs[test]' brings trustme") from error
        authority = trustme.CA()
        certificate = authority.issue_cert("127.0.0.1", "localhost", "s3.localhost", "*.s3.localhost")
        self.ca_path = str(directory / "ca.pem")
        authority.cert_pem.write_to_path(self.ca_path)
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        certificate.configure_cert(self.context)
