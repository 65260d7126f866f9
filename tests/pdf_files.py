"""Small PDFs for tests."""

import io


def pdf(*lines: str, indexed: bool = True) -> bytes:
    """A PDF with a page for each line.

    Args:
        lines: a page's text; "": the page is empty.
        indexed: with the table of objects, which some programs leave out.
    """
    pages = range(4, 4 + 2 * len(lines), 2)
    kids = " ".join(f"{number} 0 R" for number in pages)
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Kids [{kids}] /Count {len(lines)} >>",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    for number, line in zip(pages, lines, strict=True):
        content = f"BT /F1 24 Tf 72 700 Td ({line}) Tj ET"
        objects.append(
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents {number + 1} 0 R "
            "/Resources << /Font << /F1 3 0 R >> >> >>"
        )
        objects.append(f"<< /Length {len(content)} >>\nstream\n{content}\nendstream")
    out, places = "%PDF-1.4\n", []
    for number, body in enumerate(objects, 1):
        places.append(len(out))
        out += f"{number} 0 obj\n{body}\nendobj\n"
    trailer = f"trailer << /Size {len(objects) + 1} /Root 1 0 R >>\n"
    if indexed:
        table = "".join(f"{place:010} 00000 n \n" for place in places)
        head = f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n"
        trailer = f"{head}{table}{trailer}startxref\n{len(out)}\n"
    return f"{out}{trailer}%%EOF".encode("latin-1")


def encrypted(data: bytes, password: str) -> bytes:
    """The same PDF, which needs a password."""
    from pypdf import PdfReader, PdfWriter

    writer, out = PdfWriter(PdfReader(io.BytesIO(data))), io.BytesIO()
    writer.encrypt(password, algorithm="RC4-128")
    writer.write(out)
    return out.getvalue()
