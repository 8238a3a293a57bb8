"""What does a split tensor cost the processor that hands a GPU its work, against plain torch?"""
