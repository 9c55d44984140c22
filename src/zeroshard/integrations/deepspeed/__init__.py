"""DeepSpeed's interface on zeroshard: what scripts written for it call, in modules named for what they do."""
