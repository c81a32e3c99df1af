// Command typecheck checks the types of the packages in the current directory and below, tests too, from source: for another
// system GOOS=... go vet would first compile all that they import, which takes minutes.
package main

import (
	"fmt"
	"os"

	"golang.org/x/tools/go/packages"
)

func main() {
	found, err := packages.Load(&packages.Config{Mode: packages.LoadAllSyntax, Tests: true}, "./...")
	if err != nil {
		fmt.Fprintln(os.Stderr, "typecheck:", err)
		os.Exit(1)
	}
	if len(found) == 0 || packages.PrintErrors(found) > 0 {
		fmt.Fprintf(os.Stderr, "typecheck: %d packages; see above\n", len(found))
		os.Exit(1)
	}
}
