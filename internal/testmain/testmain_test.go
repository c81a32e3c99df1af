package testmain_test

import (
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/fencelab/fencelab/internal/testmain"
)

const leaves = "TESTMAIN_TEST_LEAVES"

func TestMain(m *testing.M) {
	if os.Getenv(leaves) != "" {
		*testmain.Patience = 0
	}
	testmain.Run(m)
}

func TestFindLeaks(t *testing.T) {
	if os.Getenv(leaves) != "" {
		go func() { select {} }()
		return
	}
	before := goleak.IgnoreCurrent()
	end := make(chan struct{})
	go func() { <-end }()
	late := time.AfterFunc(time.Second, func() { close(end) }) // later than goleak's own timeout
	defer late.Stop()
	require.NoError(t, testmain.FindLeaks(before))

	cmd := exec.CommandContext(t.Context(), os.Args[0])
	cmd.Env = append(os.Environ(), leaves+"=1")
	out, err := cmd.CombinedOutput()
	require.Error(t, err)
	require.Contains(t, string(out), "found unexpected goroutines")
}
