"""Data to train on, the same wherever it is drawn.

``tasks``
    Small tasks that show what a state can hold.
``digits``
    Handwritten digits, as sequences of pixels.
``texts``
    Texts in the public domain.
``facts``
    Texts in which facts come back, with the entropy of every word.
``sentences``
    Sentences whose pronoun means one of two nouns.
"""
