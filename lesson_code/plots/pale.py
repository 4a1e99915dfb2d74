"""The colors in which cells and boxes are filled, so that what stands in them can be read."""

BLUE, VERMILION, GREEN, YELLOW, GRAY = "#cfe3f2", "#fbdcc6", "#cdebe0", "#fbecc2", "#ececec"
