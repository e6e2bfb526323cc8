"""What a race or a search came to, as one HTML file that needs nothing but itself: no network, no font, no script.

    page.py      the page and its parts, outcome first
    table.py     all attempts side by side
    attempts.py  one attempt: its diff, its checks, its output
    diff.py      a patch, read and drawn in two columns
    plots.py     the timeline, memory and processors, as SVG
    tree.py      the tree of a search, as SVG
    facts.py     numbers of the document in words
    words.py     text that nobody vouches for, made fit to be read
    markup.py    elements that escape what they are given
    style.css    how it looks, in light, in dark, on a phone, on paper

Only the document, the patches and the outputs are known here; where they come from is not.
"""

from elsewhere.experiments.report.page import render

__all__ = ["render"]
