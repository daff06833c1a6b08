"""Cloud providers: one session each, their errors and retries. SDKs are imported only where they are used."""
