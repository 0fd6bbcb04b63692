"""Provide a test double of a router that maps ports, with UPnP (IGD) over SSDP and HTTP.

The double does not map any ports. It answers as such a router does, and remembers the requests.
"""

from __future__ import annotations

import re
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Self

SSDP = ("239.255.255.250", 1900)
WAN = "urn:schemas-upnp-org:service:WANIPConnection:1"
DESCRIPTION = f"""<?xml version="1.0"?><root xmlns="urn:schemas-upnp-org:device-1-0">
<specVersion><major>1</major><minor>0</minor></specVersion><device>
<deviceType>urn:schemas-upnp-org:device:InternetGatewayDevice:1</deviceType><friendlyName>router</friendlyName>
<manufacturer>-</manufacturer><modelName>-</modelName><UDN>uuid:1</UDN><deviceList><device>
<deviceType>urn:schemas-upnp-org:device:WANDevice:1</deviceType><UDN>uuid:2</UDN><deviceList><device>
<deviceType>urn:schemas-upnp-org:device:WANConnectionDevice:1</deviceType><UDN>uuid:3</UDN><serviceList><service>
<serviceType>{WAN}</serviceType><serviceId>urn:upnp-org:serviceId:WANIPConn1</serviceId>
<controlURL>/control</controlURL><eventSubURL>/event</eventSubURL><SCPDURL>/scpd.xml</SCPDURL>
</service></serviceList></device></deviceList></device></deviceList></device></root>"""


class UpnpRouter:
    """An Internet Gateway Device at `inside`. It refuses to map the ports in `refuses`."""

    def __init__(self, host: str, *, inside: str = "127.0.0.1", refuses: frozenset[int] = frozenset()) -> None:
        self.host, self.inside, self.refuses = host, inside, refuses
        self.mapped: dict[int, str] = {}  # port outside -> HOST:PORT inside
        router = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._reply(DESCRIPTION)

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"])).decode()
                self._reply(*router.act(self.headers["SOAPAction"].strip('"').rpartition("#")[2], body))

            def _reply(self, body: str, status: int = 200) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body.encode())

            def log_message(self, format: str, *args: object) -> None:
                """Log nothing."""

        self._http = ThreadingHTTPServer((inside, 0), Handler)
        self._ssdp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._ssdp.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._ssdp.bind(SSDP)
        group = socket.inet_aton(SSDP[0]) + socket.inet_aton(inside)
        self._ssdp.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, group)
        self._ssdp.settimeout(0.1)
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=each) for each in (self._http.serve_forever, self._announce)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: object, trace: TracebackType | None) -> None:
        self._is_over.set()
        self._http.shutdown()
        for thread in self._threads:
            thread.join()
        self._http.server_close()
        self._ssdp.close()

    def _announce(self) -> None:
        while not self._is_over.is_set():
            try:
                request, asker = self._ssdp.recvfrom(1024)
            except TimeoutError:
                continue
            found = re.search(rb"^ST: *(.+?)\r$", request, re.MULTILINE | re.IGNORECASE)
            if found and b"InternetGatewayDevice:1" in found[1]:
                where = f"http://{self.inside}:{self._http.server_port}/description.xml"
                kind = found[1].decode()
                lines = ("HTTP/1.1 200 OK", f"LOCATION: {where}", f"ST: {kind}", f"USN: uuid:1::{kind}", "", "")
                self._ssdp.sendto("\r\n".join(lines).encode(), asker)

    def act(self, action: str, body: str) -> tuple[str, int]:
        """Return (body, HTTP status) for a SOAP action."""

        def field(name: str) -> str:
            found = re.search(rf"<{name}>(.*?)</{name}>", body)
            return found[1] if found else ""

        values: dict[str, object] = {}
        port = int(field("NewExternalPort") or 0)
        match action:
            case "GetStatusInfo":
                values = {"NewConnectionStatus": "Connected", "NewLastConnectionError": "", "NewUptime": 1}
            case "GetExternalIPAddress":
                values = {"NewExternalIPAddress": self.host}
            case "AddPortMapping" if port in self.refuses:
                return _fault(718, "ConflictInMappingEntry"), 500
            case "AddPortMapping":
                self.mapped[port] = f"{field('NewInternalClient')}:{field('NewInternalPort')}"
            case "DeletePortMapping":
                self.mapped.pop(port, None)
            case _:
                return _fault(401, "Invalid Action"), 500
        inner = "".join(f"<{name}>{value}</{name}>" for name, value in values.items())
        return _envelope(f'<u:{action}Response xmlns:u="{WAN}">{inner}</u:{action}Response>'), 200


def _fault(code: int, text: str) -> str:
    error = f"<errorCode>{code}</errorCode><errorDescription>{text}</errorDescription>"
    return _envelope(f"<s:Fault><detail><UPnPError>{error}</UPnPError></detail></s:Fault>")


def _envelope(body: str) -> str:
    space = "http://schemas.xmlsoap.org/soap/envelope/"
    return f'<?xml version="1.0"?><s:Envelope xmlns:s="{space}"><s:Body>{body}</s:Body></s:Envelope>'
