"""One page that shows what runs did: tools/report.py."""
