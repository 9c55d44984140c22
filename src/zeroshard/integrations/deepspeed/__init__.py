"""DeepSpeed's interface on zeroshard: engine, configuration, zero.Init and what scripts import besides."""
