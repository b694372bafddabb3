"""The Decode service: sessions with routers, and the runs that are decoded here."""
