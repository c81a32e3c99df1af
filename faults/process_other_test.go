//go:build unix && !linux

package faults_test

import "syscall"

func dieWithParent() *syscall.SysProcAttr { return nil }
