"""The MCP server: what Everstep knows, for programs that speak the Model Context Protocol."""
