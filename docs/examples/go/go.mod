module decant.example/ask

go 1.19
