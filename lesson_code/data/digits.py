"""Handwritten digits, small images to be drawn pixel by pixel."""

import numpy as np

__all__ = ["load"]


def load() -> tuple[np.ndarray, np.ndarray]:
    """Images of 8×8 pixels, row by row: those to train on, and others held out.

    The 1,797 digits that scikit-learn ships, in a shuffled order that is always the same.

    Returns
    -------
    array of int64, shape (1500, 64)
        Images to train on. A pixel is one of 17 levels, 0 (paper) to 16 (ink); pixel 8 i + j is in
        row i and column j.
    array of int64, shape (297, 64)
        The others, of the same 13 writers.

    Raises
    ------
    ImportError
        If scikit-learn is not installed.

    References
    ----------
    Alpaydin and Kaynak (1998), "Optical recognition of handwritten digits", UCI machine learning
    repository: the test set.

    Examples
    --------
    >>> train, held_out = load()
    >>> train[0].reshape(8, 8).shape, int(train.max())
    ((8, 8), 16)
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError("digits.load() needs scikit-learn: pip install scikit-learn") from error
    images = load_digits().data.astype(np.int64)
    # The numbers of a bit generator are the same in every version of NumPy, a shuffle is not.
    order = np.random.PCG64(0).random_raw(len(images)).argsort()
    return images[order[:1500]], images[order[1500:]]
