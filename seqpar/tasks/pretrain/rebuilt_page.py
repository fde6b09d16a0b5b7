"""The page about a pretraining: its error on held-out cases, and pictures of what was hidden and rebuilt."""

import base64

from seqpar.report.record import RunRecord
from seqpar.report.run_page import fill_page
from seqpar.report.tables import cell, number


def rebuilt_page(record: RunRecord) -> str:
    """Returns the whole page."""
    picture, gaps = record.path / "validation.png", list[str]()
    shown = "<p>No case is shown.</p>"
    try:
        data = base64.b64encode(picture.read_bytes()).decode()
        shown = (
            '<figure class="wide"><img style="max-width:100%" alt="image, masked, rebuilt and difference" '
            f'src="data:image/png;base64,{data}"><figcaption class="small">Tiles in the middle of held-out cases: what '
            "there was, what the encoder saw of it, the same with hidden patches as they were rebuilt, and the "
            "difference.</figcaption></figure>"
        )
    except OSError as error:
        gaps.append(f"There are no pictures of held-out cases: {picture} cannot be read ({error.strerror}).")
    return fill_page(record, "", _errors(record), (), shown, {}, gaps)


def _errors(record: RunRecord) -> str:
    """Returns the table of the errors on held-out cases, validation by validation."""
    if not record.held_out:
        return "<p>There are no scores yet.</p>"
    rows = "".join(f"<tr><th>{row['step']:,}</th>{cell(number(row.get('loss')), 4)}</tr>" for row in record.held_out)
    head = "<thead><tr><th>After step</th><th>Mean squared error of what is hidden</th></tr></thead>"
    count = record.held_out[-1].get("cases", "–")
    return (
        f'<table class="metrics" id="metrics">{head}<tbody>{rows}</tbody></table>'
        f'<p class="small">On a tile of each of {count} held-out cases; the same tokens are hidden every time.</p>'
    )
