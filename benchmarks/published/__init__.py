"""Do predictions meet what others have published?"""
