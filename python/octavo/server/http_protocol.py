"""uvicorn's HTTP protocol with a limit on the size of a request's head, which it does not have itself."""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 * 1024
_ANSWER = (
    b'{"error": {"message": "the request\'s headers have more than 65536 bytes", '
    b'"type": "invalid_request_error", "param": null, "code": "headers_too_large"}}'
)
_RESPONSE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\nconnection: close\r\n"
    b"content-length: %d\r\n\r\n%b" % (len(_ANSWER), _ANSWER)
)


class LimitedHttpProtocol(HttpToolsProtocol):
    """Answers 431 and closes when a head does not end within `MAX_HEAD_BYTES` (and what one read brings)."""

    _in_head = False
    _head_bytes = 0

    def on_message_begin(self) -> None:
        self._in_head = True
        self._head_bytes = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_head and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self.transport.write(_RESPONSE)
                self.transport.close()
