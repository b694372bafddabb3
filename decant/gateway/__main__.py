from decant.gateway.main import main

raise SystemExit(main())
