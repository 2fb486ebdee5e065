"""What the corruptions of this package do not share with the official files of ImageNet-C."""

DIFFERENCES = (
    "The code is written anew over NumPy, SciPy and Pillow after the paper and the official "
    "generator's constants; its random numbers are others, so no picture equals an official file.",
    "Frost is a computed texture of bright, bluish needles; the official code adds parts of "
    "photographs of frost.",
    "The trails of motion blur and snow are summed here from whole pixels; the official code calls "
    "ImageMagick.",
    "Defocus blur and the elastic transform's affine map are computed with SciPy; the official "
    "code calls OpenCV.",
    "Lengths in pixels are the official ones, made for a side of 224, whatever the size; those of "
    "the elastic transform grow with the side.",
    "Chance depends on the seed, the image's class and name, the corruption and the severity; the "
    "official code draws all pictures from one stream.",
)
