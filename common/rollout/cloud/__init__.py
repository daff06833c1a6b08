"""The providers: one session each, their errors and retries. SDKs are imported where they are used only."""
