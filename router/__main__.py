from decant.router.main import main

raise SystemExit(main())
