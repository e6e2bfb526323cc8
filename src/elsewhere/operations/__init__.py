"""The use cases: one function for each verb. Faces (command line, SDK) parse, call one of these, and show what it returns."""
