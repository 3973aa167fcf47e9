"""How slow ranks are shown: as text, as JSON, as a page."""
