package faults_test

import (
	"context"
	"errors"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/faults"
)

func TestPause(t *testing.T) {
	paused, control := startTicker(t), startTicker(t)
	resume := inForce(t)(faults.Pause(soon(t), paused.pid()))
	before := paused.count()
	control.awaitTicks(t, 100) // long enough for a running process to tick
	require.Equal(t, before, paused.count(), "ticks under a pause")

	_, err := faults.Pause(soon(t), paused.pid())
	require.ErrorContains(t, err, "already stopped")

	require.NoError(t, resume(soon(t)))
	paused.awaitTicks(t, 1)
	require.NoError(t, resume(soon(t)))

	again := inForce(t)(faults.Pause(soon(t), paused.pid()))
	require.NoError(t, resume(soon(t)), "the first pause's heal")
	before = paused.count()
	control.awaitTicks(t, 100)
	require.Equal(t, before, paused.count(), "ticks after a heal of an earlier pause")
	require.NoError(t, again(soon(t)))
	paused.awaitTicks(t, 1)
}

func TestPauseContextEnded(t *testing.T) {
	tk := startTicker(t)
	cause := errors.New("enough")
	ended, cancel := context.WithCancelCause(t.Context())
	cancel(cause)
	_, err := faults.Pause(ended, tk.pid())
	require.ErrorIs(t, err, cause)
	require.ErrorIs(t, faults.Kill(ended, tk.pid()), cause)
	tk.awaitTicks(t, 1)

	resume := inForce(t)(faults.Pause(soon(t), tk.pid()))
	require.NoError(t, resume(soon(t)))
}

func TestKill(t *testing.T) {
	for _, paused := range []bool{false, true} {
		tk := startTicker(t)
		var resume faults.Heal
		if paused {
			resume = inForce(t)(faults.Pause(soon(t), tk.pid()))
		}
		require.NoError(t, faults.Kill(soon(t), tk.pid()))
		before := tk.count()
		startTicker(t)
		require.Equal(t, before, tk.count(), "ticks after a kill")

		check := func(state string) {
			_, err := faults.Pause(soon(t), tk.pid())
			require.ErrorIs(t, err, os.ErrProcessDone, state)
			require.ErrorIs(t, faults.Kill(soon(t), tk.pid()), os.ErrProcessDone, state)
			if paused {
				require.ErrorIs(t, resume(soon(t)), os.ErrProcessDone, state)
			}
		}
		check("not collected by its parent")
		err := tk.cmd.Wait()
		require.Error(t, err)
		status, ok := tk.cmd.ProcessState.Sys().(syscall.WaitStatus)
		require.True(t, ok)
		require.Equal(t, syscall.SIGKILL, status.Signal())
		check("gone")
	}
}

func TestPidsRefused(t *testing.T) {
	const noGroup = -1 << 30
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second) // init would ignore the signals
	defer cancel()
	for pid, reason := range map[int]string{
		noGroup:     "process group",
		-1:          "process group",
		0:           "process group",
		1:           "init",
		os.Getpid(): "this process",
	} {
		_, err := faults.Pause(ctx, pid)
		require.ErrorContains(t, err, reason)
		require.ErrorContains(t, faults.Kill(ctx, pid), reason)
	}
}
