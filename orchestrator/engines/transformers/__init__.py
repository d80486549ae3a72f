"""All that knows the library transformers, which is imported when something here is called."""
