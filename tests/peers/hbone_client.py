"""An HBONE client that shares nothing with ours: one CONNECT over mTLS and HTTP/2, with the h2 package.

Usage: hbone_client.py ADDRESS PORT AUTHORITY CERTIFICATE KEY ROOT IDENTITY [METHOD]

Prints the status, then what came back for b"hello\\n" and the end of the request.
"""

import socket
import ssl
import sys

import h2.config
import h2.connection
import h2.events

address, port, authority, certificate, key, root, identity = sys.argv[1:8]
method = sys.argv[8] if len(sys.argv) > 8 else "CONNECT"

context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
context.check_hostname = False  # The name is a URI; it is compared below.
context.minimum_version = ssl.TLSVersion.TLSv1_3
context.load_verify_locations(root)
context.load_cert_chain(certificate, key)
context.set_alpn_protocols(["h2"])

with socket.create_connection((address, int(port)), timeout=10) as tcp, context.wrap_socket(tcp) as tls:
    assert tls.selected_alpn_protocol() == "h2", tls.selected_alpn_protocol()
    names = [value for kind, value in tls.getpeercert()["subjectAltName"] if kind == "URI"]
    assert names == [identity], names

    # Not validated: a plain CONNECT has no path, and odd requests are wanted too.
    config = h2.config.H2Configuration(header_encoding="utf-8", validate_outbound_headers=False)
    connection = h2.connection.H2Connection(config)
    connection.initiate_connection()
    headers = [(":method", method), (":authority", authority)]
    if method != "CONNECT":
        headers += [(":scheme", "https"), (":path", "/")]
    stream = connection.get_next_available_stream_id()
    connection.send_headers(stream, headers)
    tls.sendall(connection.data_to_send())

    body, ended = b"", False
    while not ended:
        data = tls.recv(65536)
        if not data:
            sys.exit("the server has closed the connection")
        for event in connection.receive_data(data):
            if isinstance(event, h2.events.ResponseReceived):
                status = dict(event.headers)[":status"]
                print("status", status, flush=True)
                if status == "200":
                    connection.send_data(stream, b"hello\n", end_stream=True)
            elif isinstance(event, h2.events.DataReceived):
                body += event.data
                connection.acknowledge_received_data(event.flow_controlled_length, stream)
            elif isinstance(event, h2.events.StreamReset):
                sys.exit(f"the stream was reset: {event.error_code}")
            elif isinstance(event, h2.events.ConnectionTerminated):
                sys.exit(f"the connection was terminated: {event.error_code}")
            elif isinstance(event, h2.events.StreamEnded):
                ended = True
        tls.sendall(connection.data_to_send())
    print("body", body.decode(), flush=True)
