"""What every request and every answer passes: limits, tokens, problems, pages, live streams."""
