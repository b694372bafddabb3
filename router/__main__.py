from router.main import main

raise SystemExit(main())
