"""Other people's tools on zeroshard: each folder speaks the interface of one of them."""
