"""Drawing: tables for people, JSON for programs. The only place, with the command line, that knows rich."""
