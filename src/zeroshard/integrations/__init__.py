"""zeroshard in the tools that people train with: each folder speaks one tool's language, over the verbs of zeroshard."""
