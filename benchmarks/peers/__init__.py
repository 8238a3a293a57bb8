"""The same ops and models on fullframe and on other libraries that split images: exact? how fast? how many bytes?"""
