"""The global proxy: prefill on one engine, decode on another, for OpenAI completions and chat."""
