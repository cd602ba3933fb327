"""An HBONE client in bad faith: requests that are none, one after the other on one connection, and a good one after each.

Usage: hostile.py ADDRESS PORT AUTHORITY CERTIFICATE KEY ROOT < requests.json

The requests are a list of lists of headers. For each a line: what it got (`status N`, `reset N`, `goaway N`), and what the good request to
AUTHORITY got after it, on the same connection (`gone` if there is none any more: the next then begins another).
"""

import json
import socket
import ssl
import sys

import h2.config
import h2.connection
import h2.events

address, port, authority, certificate, key, root = sys.argv[1:7]
GOOD = [(":method", "CONNECT"), (":authority", authority)]

context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
context.check_hostname = False
context.verify_mode = ssl.CERT_NONE  # Who the server is is not the matter here.
context.load_cert_chain(certificate, key)
context.set_alpn_protocols(["h2"])


class Connection:
    def __init__(self):
        tcp = socket.create_connection((address, int(port)), timeout=30)
        self.tls = context.wrap_socket(tcp)
        config = h2.config.H2Configuration(
            header_encoding="utf-8", validate_outbound_headers=False, normalize_outbound_headers=False
        )
        self.h2 = h2.connection.H2Connection(config)
        self.h2.initiate_connection()
        self.gone = False

    def ask(self, headers):
        """Sends a request without an end, and tells what it gets."""
        stream = self.h2.get_next_available_stream_id()
        self.h2.send_headers(stream, headers)
        try:
            self.tls.sendall(self.h2.data_to_send())
            while True:
                data = self.tls.recv(65536)
                if not data:
                    break
                for event in self.h2.receive_data(data):
                    if isinstance(event, h2.events.ConnectionTerminated):
                        self.gone = True
                        return f"goaway {int(event.error_code)}"
                    if getattr(event, "stream_id", None) != stream:
                        continue
                    if isinstance(event, h2.events.ResponseReceived):
                        return "status " + dict(event.headers)[":status"]
                    if isinstance(event, h2.events.StreamReset):
                        return f"reset {int(event.error_code)}"
                self.tls.sendall(self.h2.data_to_send())
        except (ConnectionError, ssl.SSLError):
            pass
        self.gone = True
        return "gone"


connection = Connection()
for headers in json.load(sys.stdin):
    got = connection.ask([(name, value) for name, value in headers])
    then = "gone" if connection.gone else connection.ask(GOOD)
    print(f"{got}, then {then}", flush=True)
    if connection.gone:
        connection = Connection()
