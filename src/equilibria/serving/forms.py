"""Files in HTTP forms (multipart/form-data, RFC 7578)."""

from __future__ import annotations

from collections.abc import Iterator
from email.message import Message
from email.parser import BytesHeaderParser

MAX_FIELDS = 32
"""Maximum number of fields in a form."""
MAX_HEADER = 4096
"""Maximum number of characters in the headers of a field, and in the content type of the form."""


class FormError(ValueError):
    """The body is not a form with exactly one file."""


def file_of(content: bytes, content_type: str) -> bytes:
    """Return the file in the body of a request.

    Args:
        content: Body of the request.
        content_type: `Content-Type` of the request. Unless it is multipart/form-data, the body
            itself is the file.

    Returns:
        The content of the only field that has a file name. Other fields are ignored.

    Raises:
        FormError: If a form is malformed, or has no file, an empty file or several files.
    """
    if not content_type.lower().startswith("multipart/form-data"):
        return content
    header = Message()
    header["Content-Type"] = content_type[:MAX_HEADER]
    boundary = header.get_boundary()
    if not boundary:
        raise FormError("the Content-Type of the form has no boundary; use curl -F file=@IMAGE")
    fields = [_field(part) for part in _parts(content, boundary.encode("latin-1", "replace"))]
    files = [value for is_file, value in fields if is_file]
    if len(files) != 1:
        count = f"{len(files)} files" if files else "no file"
        raise FormError(
            f"the form has {count}; send one image per request, for example curl -F file=@IMAGE"
        )
    if not files[0]:
        raise FormError("the file in the form is empty; send an image file")
    return files[0]


def _parts(content: bytes, boundary: bytes) -> Iterator[bytes]:
    """Yield the fields of a form, each with its headers."""
    _, *parts = (b"\r\n" + content).split(b"\r\n--" + boundary, MAX_FIELDS + 2)
    for number, part in enumerate(parts):
        if part.startswith(b"--"):  # "--" marks the last boundary
            return
        if number == MAX_FIELDS:
            raise FormError(f"the form has more than {MAX_FIELDS} fields; send only the image")
        yield part
    raise FormError("the form is incomplete: its last boundary is missing")


def _field(part: bytes) -> tuple[bool, bytes]:
    """Return whether a field is a file, and its content."""
    head, blank_line, value = part.partition(b"\r\n\r\n")
    if not blank_line or len(head) > MAX_HEADER:
        raise FormError(
            "the form is malformed: a field has no headers, or its headers are too long"
        )
    headers = BytesHeaderParser().parsebytes(head.lstrip())
    return headers.get_filename() is not None, value
