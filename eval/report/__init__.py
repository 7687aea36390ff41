"""Reports as JSON, Markdown, HTML and SVG."""
