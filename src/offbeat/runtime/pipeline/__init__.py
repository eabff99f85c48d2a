"""Running the stages of a pipeline: messages between them, their steps, and the state of one model in parts."""
