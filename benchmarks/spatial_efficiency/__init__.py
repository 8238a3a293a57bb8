"""What splitting costs in time: ConvNeXt-tiny on 2 ranks against one process and against the bound."""
